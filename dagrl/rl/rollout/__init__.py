"""From prompts to scored groups: episodes, their dispatch to engines, and the trajectory buffer."""
