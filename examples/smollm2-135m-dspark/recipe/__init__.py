"""Makes the demonstration drafter: prompts -> the target's answers -> training -> evaluation. See README.md."""
