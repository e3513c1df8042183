"""The built-in recipes: models and data that a job trains without code of its own.

What parameters they have stands in `trainer.plan.recipe_catalog`. To add one: a module here, a line in
`registry.BUILDERS`, an entry in the catalog. Not for: how they are trained (the job file's `train`).
"""
