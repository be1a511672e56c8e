"""What each fault looks like in the facts about a loop: one file per family of codes."""
