"""What all four packages share: names of files and variables, records, outcomes, exit codes, the bundle format.

Standard library only, so that it can be imported in any interpreter a job names. Nothing here talks to a network or a
database; `bundles` is the one module that touches the file system, since packing and unpacking must agree exactly.
"""
