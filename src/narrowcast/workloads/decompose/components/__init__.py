"""What a target's matrices are taken apart into: sites, their components, and masked passes."""
