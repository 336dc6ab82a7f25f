import signal

# A shell without job control starts background commands with SIGINT ignored, and children inherit that:
# the tests of Ctrl-C would then wait for an interrupt that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
