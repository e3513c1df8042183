"""The command `gang`: a file per noun, loaded when its command runs.

Data goes to stdout, everything else to stderr. Not for: talking HTTP (`gangline.client`).
"""
