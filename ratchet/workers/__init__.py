"""Import paths that verl users type; the work is elsewhere."""
