"""OpenCL device, programs, and the engine that runs a model on it."""
