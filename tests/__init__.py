"""Tests by tier: unit, property, simulator, integration, distributed, chaos, e2e, contracts; and bench."""
