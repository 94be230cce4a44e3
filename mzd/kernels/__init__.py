"""OpenCL C sources."""
