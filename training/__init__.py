"""Trains the model that ships with the project: see README.md here."""
