"""What people and programs read: tables for a terminal, documents for JSON. Nothing is decided here."""
