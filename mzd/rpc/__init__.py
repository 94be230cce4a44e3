"""MessagePack-RPC over a Unix socket: frames, server, client."""
