"""Applying a `ParallelPlan` to a model: one file per way to split it, behind `apply_plan`."""
