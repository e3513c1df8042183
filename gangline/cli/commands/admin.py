"""`gang admin`: the groups `user`, `team` and `token`, and what people may hold.

Not for: their commands, a file per noun beside this one.
"""

from __future__ import annotations

from gangline.cli.lazy import LazyCommand, LazyGroup

_AT = "gangline.cli.commands"

user = LazyGroup(
    name="user",
    help="People who may use the pool.",
    lazy_commands={
        "ls": LazyCommand(target=f"{_AT}.admin_user:ls", help="List users."),
        "create": LazyCommand(target=f"{_AT}.admin_user:create", help="Create a user."),
        "disable": LazyCommand(target=f"{_AT}.admin_user:disable", help="Disable a user; jobs stay."),
    },
)
team = LazyGroup(
    name="team",
    help="Teams and their members.",
    lazy_commands={
        "ls": LazyCommand(target=f"{_AT}.admin_team:ls", help="List teams."),
        "create": LazyCommand(target=f"{_AT}.admin_team:create", help="Create a team."),
        "add": LazyCommand(target=f"{_AT}.admin_team:add", help="Put users into a team."),
        "remove": LazyCommand(target=f"{_AT}.admin_team:remove", help="Take users out of a team."),
    },
)
token = LazyGroup(
    name="token",
    help="Tokens of users and for enrolling nodes.",
    lazy_commands={
        "ls": LazyCommand(target=f"{_AT}.admin_token:ls", help="List tokens."),
        "create": LazyCommand(target=f"{_AT}.admin_token:create", help="Make a token; it is shown once."),
        "revoke": LazyCommand(target=f"{_AT}.admin_token:revoke", help="Revoke a token at once."),
    },
)
admin = LazyGroup(
    name="admin",
    help="Users, teams, what they may hold, and tokens. Your own tokens need no admin.",
    lazy_commands={
        "user": LazyCommand(target=f"{_AT}.admin:user", help="People who may use the pool."),
        "team": LazyCommand(target=f"{_AT}.admin:team", help="Teams and their members."),
        "token": LazyCommand(target=f"{_AT}.admin:token", help="Tokens of users and for enrolling nodes."),
        "quota": LazyCommand(target=f"{_AT}.admin_quota:quota", help="What a team is guaranteed, and its cap."),
        "cap": LazyCommand(target=f"{_AT}.admin_quota:cap", help="The most GPUs that a user holds at once."),
        "grant-priority": LazyCommand(
            target=f"{_AT}.admin_priority:grant", help="Let a user give jobs the priority top."
        ),
        "revoke-priority": LazyCommand(target=f"{_AT}.admin_priority:revoke", help="Take the priority top back."),
        "log": LazyCommand(target=f"{_AT}.admin_log:log", help="Who changed what of the pool."),
    },
)
