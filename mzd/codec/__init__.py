"""KV codecs: a chunk to bytes and back, natively and without the GIL."""
