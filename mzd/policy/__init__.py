"""Pure policy: states, plans, decisions; no clock, no I/O."""
