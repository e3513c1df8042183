"""One frozen, typed `Settings`: every value the service can be told, with its meaning, unit and default.

Read from `GANGLINE_SERVER_<NAME>` variables. Combinations that would break a promise refuse to start, by name of the
rule. Not for: what a job says (`service.domain.spec`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.errors import SettingsError

ENV_PREFIX = "GANGLINE_SERVER_"
POLICY_NAMES = ("time-left", "fifo", "fifo+easy")
"""As registered in `service.scheduler.policies`."""
PREEMPTION_KINDS = ("all", "reclaim_only", "none")
SMALL_POOL_NODES = 32
"""Up to this many nodes, agents are told `heartbeat_seconds`; beyond it `heartbeat_large_pool_seconds`."""


def _setting(default: Any, meaning: str) -> Any:  # Any: what dataclasses.field returns stands for the field's type
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings. `meaning` of each field is what the documentation prints."""

    data_folder: Path = _setting(Path(".data"), "Folder of everything the server keeps (mode 0700).")
    database_url: str = _setting("", "SQL database; empty: SQLite in the data folder.")
    sqlite_synchronous: str = _setting("NORMAL", "NORMAL survives a killed process, FULL also a power cut (slower).")
    broker_url: str = _setting("", "Celery broker for hints; empty: heartbeats alone start jobs.")
    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(7700, "Port to listen on; 0: a free one.")
    behind_proxy: bool = _setting(False, "A TLS proxy stands in front; needed to listen on other than loopback.")
    run_scheduler: bool = _setting(True, "Scheduler, sweeper and dispatcher run as threads of the API process.")
    heartbeat_seconds: float = _setting(2.0, "Interval told to agents in a small pool (up to 32 nodes).")
    heartbeat_large_pool_seconds: float = _setting(10.0, "Interval told to agents in a larger pool.")
    unreachable_seconds: float = _setting(15.0, "Silence after which a node gets no new work.")
    lost_seconds: float = _setting(120.0, "Silence after which a node's attempts end as node_lost.")
    mass_silence_seconds: float = _setting(600.0, "Longest wait when over a third of all nodes fall silent at once.")
    claim_seconds: float = _setting(15.0, "An allocation that no agent claims is taken back after this long.")
    start_seconds: float = _setting(300.0, "From allocation to all ranks started; then the attempt is launch_failed.")
    settle_seconds: float = _setting(60.0, "After the last grace, how long the outcome waits for reports of nodes.")
    stop_grace_limit_seconds: float = _setting(3600.0, "Largest stop_grace a job may ask for.")
    missing_attempt_seconds: float = _setting(10.0, "A claimed attempt that its agent no longer knows ends after this.")
    sweep_seconds: float = _setting(1.0, "Interval of the sweeper that looks at deadlines and silent nodes.")
    idle_holder_seconds: float = _setting(1800.0, "A job none of whose GPUs works for this long is named as idle.")
    policy: str = _setting("time-left", "Who goes first: time-left, fifo, or fifo+easy (first come, with backfill).")
    preemption: str = _setting(
        "all", "Whom the scheduler stops: all (where it pays), reclaim_only (to give teams their quota back), none."
    )
    schedule_seconds: float = _setting(5.0, "Slow tick of the scheduler; events wake it at once.")
    gather_seconds: float = _setting(0.05, "Supervisors gather log bytes at most this long.")
    body_limit_bytes: int = _setting(1_048_576, "Largest request body, bundles excepted.")
    bundle_limit_bytes: int = _setting(512 * 1_048_576, "Largest code bundle.")
    leader_lease_seconds: float = _setting(10.0, "Lease of the scheduling process on PostgreSQL.")
    free_space_limit_bytes: int = _setting(64 * 1_048_576, "The server refuses to start with less free space.")

    @property
    def resolved_database_url(self) -> str:
        """The database URL with the default filled in."""
        return self.database_url or f"sqlite:///{(self.data_folder / 'gangline.db').resolve()}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **overrides: object) -> Settings:
        """Settings from `GANGLINE_SERVER_*`, then `overrides`. Raises SettingsError with all problems at once."""
        values: dict[str, object] = {}
        problems: list[str] = []
        fields = {spec.name: spec for spec in dataclasses.fields(cls)}
        for key, raw in environment.items():
            if not key.startswith(ENV_PREFIX):
                continue
            name = key[len(ENV_PREFIX) :].lower()
            if name not in fields:
                problems.append(f"{key}: unknown setting. Known: {', '.join(sorted(fields))}.")
                continue
            try:
                values[name] = _convert(str(fields[name].type), raw)
            except ValueError:
                problems.append(f"{key}={raw!r}: expected {fields[name].type}.")
        values.update({name: value for name, value in overrides.items() if value is not None})
        if problems:
            raise SettingsError("\n".join(problems))
        settings = cls(**values)  # type: ignore[arg-type]  # names and types were checked above
        settings.check()
        return settings

    def check(self) -> None:
        """Refuse contradictions. Raises SettingsError that names each rule broken, with the values and the fix."""
        problems = [text for holds, text in _rules(self) if not holds]
        if problems:
            raise SettingsError("\n".join(problems))


def _rules(s: Settings) -> list[tuple[bool, str]]:
    positive = [
        spec.name
        for spec in dataclasses.fields(s)
        if spec.name.endswith(("_seconds", "_bytes")) and not 0 < getattr(s, spec.name) < math.inf
    ]
    return [
        (not positive, f"{', '.join(positive)}: must be greater than 0 and finite."),
        (
            s.heartbeat_seconds * 3 <= s.unreachable_seconds,
            f"heartbeat_seconds × 3 ≤ unreachable_seconds must hold, but {s.heartbeat_seconds:g} × 3 > "
            f"{s.unreachable_seconds:g}: raise unreachable_seconds or lower heartbeat_seconds.",
        ),
        (
            s.heartbeat_seconds <= s.heartbeat_large_pool_seconds,
            f"heartbeat_seconds ≤ heartbeat_large_pool_seconds must hold, but {s.heartbeat_seconds:g} > "
            f"{s.heartbeat_large_pool_seconds:g}.",
        ),
        (
            s.unreachable_seconds < s.lost_seconds,
            f"unreachable_seconds < lost_seconds must hold, but {s.unreachable_seconds:g} ≥ {s.lost_seconds:g}: "
            "raise lost_seconds.",
        ),
        (
            s.heartbeat_large_pool_seconds * 3 < s.lost_seconds,
            f"heartbeat_large_pool_seconds × 3 < lost_seconds must hold, but {s.heartbeat_large_pool_seconds:g} × 3 ≥ "
            f"{s.lost_seconds:g}: raise lost_seconds or lower heartbeat_large_pool_seconds.",
        ),
        (
            s.claim_seconds < s.start_seconds,
            f"claim_seconds < start_seconds must hold, but {s.claim_seconds:g} ≥ {s.start_seconds:g}.",
        ),
        (
            s.claim_seconds > s.heartbeat_seconds,
            f"claim_seconds > heartbeat_seconds must hold (a job starts by heartbeat when its hint is lost), but "
            f"{s.claim_seconds:g} ≤ {s.heartbeat_seconds:g}.",
        ),
        (
            s.sweep_seconds * 3 <= s.unreachable_seconds,
            f"sweep_seconds × 3 ≤ unreachable_seconds must hold, but {s.sweep_seconds:g} × 3 > "
            f"{s.unreachable_seconds:g}.",
        ),
        (
            s.behind_proxy or s.host in ("127.0.0.1", "::1", "localhost"),
            f"host {s.host} is not loopback: tokens would cross the network in clear. Put a TLS proxy in front and set "
            "behind_proxy=true.",
        ),
        (
            s.sqlite_synchronous in ("NORMAL", "FULL"),
            f"sqlite_synchronous is NORMAL or FULL, not {s.sqlite_synchronous!r}.",
        ),
        (
            s.run_scheduler or not s.resolved_database_url.startswith("sqlite"),
            "run_scheduler=false needs PostgreSQL: only the API process may open a SQLite file.",
        ),
        (s.policy in POLICY_NAMES, f"policy is one of {', '.join(POLICY_NAMES)}, not {s.policy!r}."),
        (
            s.preemption in PREEMPTION_KINDS,
            f"preemption is one of {', '.join(PREEMPTION_KINDS)}, not {s.preemption!r}.",
        ),
        (0 <= s.port <= 65535, f"port {s.port} is not in 0..65535."),
    ]


def _convert(type_name: str, raw: str) -> object:
    if type_name == "bool":
        if raw.lower() not in ("true", "false", "1", "0"):
            raise ValueError(raw)
        return raw.lower() in ("true", "1")
    return {"int": int, "float": float, "Path": Path, "str": str}[type_name](raw)


def interval_seconds(settings: Settings, num_nodes: int) -> float:
    """Interval between heartbeats that the agents of a pool of this size are told."""
    is_small = num_nodes <= SMALL_POOL_NODES
    return settings.heartbeat_seconds if is_small else settings.heartbeat_large_pool_seconds


def silent_seconds(settings: Settings, num_nodes: int) -> float:
    """Silence after which a node gets no new work for the moment, though it is not yet unreachable."""
    return interval_seconds(settings, num_nodes) * 2 + 1


def unreachable_seconds(settings: Settings, num_nodes: int) -> float:
    """Silence after which a node is unreachable: the setting, but never less than three missed heartbeats."""
    return max(settings.unreachable_seconds, interval_seconds(settings, num_nodes) * 3)


def settings_from_process_environment(**overrides: object) -> Settings:
    """The settings of this process; the only place that reads its environment."""
    return Settings.from_environment(os.environ, **overrides)
