"""Model files: pull, import, weight store, tokenizer, chat template."""
