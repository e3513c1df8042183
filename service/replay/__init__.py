"""`gang replay`: a recorded trace run through the production scheduler, beside a yardstick and an oracle."""
