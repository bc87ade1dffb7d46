"""What `flambeau inspect` prints and writes, option by option."""
