"""What a task's model costs, counted from shapes alone: `profile_task`. Not for: planning with it (`trainer.plan`)."""

from __future__ import annotations

from trainer.profile.profiling import profile_task

__all__ = ["profile_task"]
