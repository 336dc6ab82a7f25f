"""Recorded inputs fed to the policy again, under another choice."""
