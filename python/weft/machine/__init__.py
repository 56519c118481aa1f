"""The machine underneath: what it is made of (topology), what each rank gets of it (placement), what is wrong with it
(doctor), and the settings of other libraries that follow (settings). Needs neither torch nor the native module."""
