"""The commands of `epmoe` that are more than a line, and what they share; `cli` puts them together."""
