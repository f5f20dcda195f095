"""Runs of many trajectories: with a model, and simulated."""
