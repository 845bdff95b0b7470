"""Repeated layers: one layer is planned, and its plan is copied to all."""
