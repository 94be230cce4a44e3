"""The command line: talks to the daemon through `mzd.rpc` only; `serve`, `pull` and `import` need none."""
