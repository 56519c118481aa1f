/* A ring of the rail (docs/protocols/rail.md): chunk n goes from slot n mod S of the sender's ring to slot n mod S of the receiver's.
   Puts settle in any order, word by word, each with the signal of its slot; credits come in any order and only count. The sender
   may post chunk n while n - credits < S. Safe: the receiver reads chunk n whole, a put never finds its slot in use (so posting
   never waits), and everything arrives. Mutants, each must fail: ONESIGNAL (a counter for all slots), SIGNALFIRST (before the data),
   ANYORDER (chunks are taken as they come), CREDITFIRST (before the slot is read). .ci/long.d/models runs all. */
#ifndef S
#define S 3
#endif
#ifndef N
#define N 8
#endif
byte sent0[S], sent1[S], got0[S], got1[S]; /* two words of each slot, n + 1 */
byte filled[S];                            /* how often the slot was filled */
byte all_signals = 0;
bool in_flight[S];
byte credits = 0, credits_in_flight = 0;
bool taken[N + 1];

proctype Sender() {
  byte n = 0;
  do
  :: n == N -> break
  :: n < N && n < credits + S ->
     sent0[n % S] = n + 1;
     sent1[n % S] = n + 1;
     assert(!in_flight[n % S]);
     in_flight[n % S] = true;
     n++
  od
}

inline arrive(slot) {
  filled[slot]++;
  all_signals++
}

proctype Put(byte slot) {
end:
  do
  :: in_flight[slot] ->
#ifdef SIGNALFIRST
     arrive(slot);
#endif
     got0[slot] = sent0[slot];
     got1[slot] = sent1[slot];
     d_step {
#ifndef SIGNALFIRST
       arrive(slot);
#endif
       in_flight[slot] = false
     }
  od
}

proctype Credits() {
end:
  do
  :: d_step { credits_in_flight > 0 -> credits_in_flight--; credits++ }
  od
}

#ifdef ONESIGNAL
#define HAS_ARRIVED(n) (all_signals >= (n) + 1)
#else
#define HAS_ARRIVED(n) (filled[(n) % S] >= (n) / S + 1)
#endif

inline take(n) {
#ifdef CREDITFIRST
  credits_in_flight++;
#endif
  assert(got0[(n) % S] == (n) + 1);
  assert(got1[(n) % S] == (n) + 1);
  taken[n] = true;
#ifndef CREDITFIRST
  credits_in_flight++
#endif
}

proctype Receiver() {
  byte n = 0;
  do
  :: n == N -> break
  :: n < N && taken[n] -> n++
  :: n < N && !taken[n] && HAS_ARRIVED(n) -> take(n)
#ifdef ANYORDER
  :: n + 1 < N && !taken[n + 1] && HAS_ARRIVED(n + 1) -> take(n + 1)
#endif
  od
}

init {
  byte slot = 0;
  atomic {
    run Sender();
    run Receiver();
    run Credits();
    do
    :: slot == S -> break
    :: slot < S -> run Put(slot); slot++
    od
  }
}
