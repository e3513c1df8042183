"""The REST API: thin routes per resource. They parse, authorise, call one operation or query, and answer.

No rule lives here.
"""
