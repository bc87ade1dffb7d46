"""Where labelled images lie: folders, packed files, arrays, sets known by name, a user's own function."""
