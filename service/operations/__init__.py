"""What users and nodes do, a file per verb. Each loads, decides and applies in one short transaction."""
