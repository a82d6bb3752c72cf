"""Carry out a plan: units, journal, output directories and object stores."""
