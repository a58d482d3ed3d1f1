"""Running models and judging what they give: inputs, sessions, runners, comparison, timing."""
