/* Pages, generations and incarnations (R13, R21): a survivor in slot 0 works with the old incarnation of slot 1, loses it without
   knowing whether it lives, or lets it go at a boundary, then works with a new incarnation of slot 1, and recovers once more.
   Modelled is the survivor's memory, which both incarnations of slot 1 map and write: payload first, then the header. The old
   incarnation may sleep between any two writes, wake up at any time and go on; it may end anywhere. A recovery takes fresh pages;
   with FLIP it flips between two prepared generations, back to the first one only when the old incarnation is proven gone. A
   planned change keeps pages and sequence. Mutants, each must fail: KEEPPAGES, NOACK; with FLIP NOPROOF, NOEPOCH. .ci/long.d/models runs all. */
#ifndef OPS
#define OPS 3
#endif
#define GENS 3
#define OLD 1
#define NEW 2
#define OVER 5                        /* epochs are 1 to 4 */
#ifdef NOEPOCH
#define TAG(e,s) (s)
#else
#define TAG(e,s) ((e)*8+(s))
#endif
#define WORD(who,e,s) ((who)*64+(e)*8+(s))
#define CELL(g,s) (((g)*2)+((s)%2))
byte hdr[GENS*2], pay[GENS*2];
byte said_old = 0, said_new = 0;      /* the operation whose header the survivor has written to each incarnation's memory */
byte boundary = 0;                    /* before which operation the old incarnation is let go; 0: nobody has asked */
bool acked = 0, gone = 0, refused = 0; /* of the old incarnation */
byte new_epoch = 0, new_gen = 0, new_first = 0;

inline send(who, g, e, s) {
  pay[CELL(g,s)] = WORD(who,e,s);
  hdr[CELL(g,s)] = TAG(e,s)
}

proctype Old() {
  byte s = 1;
  do
  :: s > OPS+1 || (acked && s >= boundary) -> break
  :: s <= OPS+1 && !(acked && s >= boundary) ->
     send(OLD, 0, 1, s);
wait:  if :: atomic { boundary != 0 && !acked && !refused -> if :: s < boundary -> acked = 1 :: else -> refused = 1 fi }; goto wait
          :: said_old >= s -> s++                 /* the survivor's header of this operation has come */
          :: true -> break                        /* it ends */
       fi
  od;
  gone = 1
}

proctype New() {
  byte e = 0, g, s;
  do
  :: new_epoch == OVER -> break
  :: atomic { new_epoch > e && new_epoch != OVER -> e = new_epoch; g = new_gen; s = new_first };
     do
     :: new_epoch != e || s >= new_first + OPS -> break
     :: new_epoch == e && s < new_first + OPS ->
        send(NEW, g, e, s);
        if :: said_new >= s || new_epoch != e -> s++ fi
     od
  od
}

/* operation s of epoch e in generation g with an incarnation */
inline op(who, g, e, s) {
  if
  :: hdr[CELL(g,s)] == TAG(e,s) -> assert(pay[CELL(g,s)] == WORD(who,e,s)); ok = 1
  :: true -> ok = 0                              /* given up: it is late, or has ended */
  fi
}

proctype Survivor() {
  byte s = 1, g = 0, last;
  bool ok;
  /* epoch 1, with the old incarnation */
  do
  :: s > OPS -> break
  :: s <= OPS -> said_old = s; op(OLD, 0, 1, s); if :: ok -> s++ :: else -> break fi
  :: s <= OPS && boundary == 0 -> boundary = s + 1 /* it is to be let go */
  :: boundary == s -> break
  od;
  if
#ifdef NOACK
  :: ok && boundary == s -> skip                 /* let go, whatever it said */
#else
  :: ok && boundary == s && acked -> skip        /* let go: pages and sequence stay */
#endif
  :: true ->                                     /* a recovery without it */
#ifndef KEEPPAGES
     g = 1;
#endif
     s = 1
  fi;
  /* a new incarnation comes into the slot: a planned change */
  last = s + OPS;
  atomic { new_gen = g; new_first = s; said_new = 0; new_epoch = 3 };
  do
  :: s >= last -> break
  :: s < last -> said_new = s; op(NEW, g, 3, s); if :: ok -> s++ :: else -> break fi
  od;
  /* a recovery with it: fresh pages again */
#ifdef FLIP
  if
#ifdef NOPROOF
  :: g == 1 -> g = 0
#else
  :: g == 1 && gone -> g = 0                     /* nobody writes there any more */
#endif
  :: true -> g = 2
  fi;
#else
  g = 2;
#endif
  s = 1; last = 1 + OPS;
  atomic { new_gen = g; new_first = 1; said_new = 0; new_epoch = 4 };
  do
  :: s >= last -> break
  :: s < last -> said_new = s; op(NEW, g, 4, s); if :: ok -> s++ :: else -> break fi
  od;
  new_epoch = OVER
}

init { atomic { run Old(); run New(); run Survivor() } }
