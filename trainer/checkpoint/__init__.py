"""Checkpoints: complete or absent, of every layout of ranks, the newest ones kept.

`checkpointer.Checkpointer` is what the loop calls. `layout` and `retention` need no torch: names, manifest, what may
be deleted. Not for: when a checkpoint is due (the loop), or which one a job resumes from (the API).
"""
