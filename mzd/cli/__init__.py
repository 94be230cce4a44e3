"""The command line; talks to the daemon through rpc.client only."""
