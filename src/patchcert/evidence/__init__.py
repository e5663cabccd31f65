"""Evidence: one row per image, written once and counted ever after."""
