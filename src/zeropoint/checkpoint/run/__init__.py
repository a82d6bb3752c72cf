"""Carry out a plan: units of work, the journal, output directories and object stores."""
