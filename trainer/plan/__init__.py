"""What a training run is, as data: strategy, settings, recipes, the plan file. Standard library only, never torch.

The API validates a job with this code and the ranks run what it describes, so both mean the same. Not for: running.
"""
