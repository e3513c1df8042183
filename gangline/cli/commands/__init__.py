"""One file per command or group. Each imports what it needs when it runs."""
