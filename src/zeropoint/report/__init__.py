"""Reports for people and programs: terminal tables and JSON documents."""
