"""`gang up`: the whole pool on one machine, each part a process, restarted when it dies, stopped in order."""
