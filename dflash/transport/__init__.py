"""Hidden states from target ranks to drafter ranks: control sockets, payload channels, the hidden-state queue."""
