"""Pure readers and writers of formats: values in, values out, no I/O."""
