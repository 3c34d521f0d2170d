"""Sites of a target, their components, and masked passes."""
