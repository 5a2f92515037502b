"""The drafter: its shape and model, what it sees, how it attends, what it is trained on and how it steps."""
