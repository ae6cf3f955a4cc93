"""Looks at programs: decisions, numbers, errors, and better rules."""
