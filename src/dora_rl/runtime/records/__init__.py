"""What a run writes down as it goes, and how it is resumed from that."""
