"""Conversations to tokens and loss masks, the corpus they are kept in, and the order in which they are used."""
