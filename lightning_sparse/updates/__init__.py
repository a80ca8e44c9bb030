"""The exchange of optimizer updates: the arithmetic of one segment, and all segments of a rank."""
