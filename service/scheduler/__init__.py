"""Who starts where: `world`, `placement`, `plan` are pure; `cycle` is the shell that loads, plans and applies."""
