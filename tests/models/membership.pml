/* Membership, docs/protocols/membership.md: N ranks in operations admit rank N at boundary B; ranks may die at labelled points,
   an operation may be given up without a death (TMO), those left recover; a recovery may leave out a rank that is alive (EVICT),
   which goes on writing until it notices. One register an epoch, changed by compare-and-set only; committed is final. An era is
   a set of epochs that share pages. With PAGES each header has a payload, and whoever has a header reads what belongs to it.
   Mutants, each must fail: NOACK STALEACK NOWAIT NOCAS OWNLIST NOTFINAL EPOCHABORT KEEPPAGES. .ci/long.d/models runs all. */
#ifndef N
#define N 2
#endif
#define M (N+1)
#ifndef S
#define S 2              /* operations before the end */
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef TMO
#define TMO 0
#endif
#ifndef E
#define E 3              /* epochs */
#endif
#define OPEN 0
#define PROP 1
#define COMM 2
byte rst[E+2], rmask[E+2]; bool rec[E+2];
byte B = 0, crashes = 0, tmo = 0;
bool withdrawn = 0, acked[M], dead[M], gone[M];
byte step[M];
byte h[(E+1)*2*M*M];           /* headers by (era, parity, dst, src) */
#ifdef PAGES
byte pay[(E+1)*2*M*M];
#endif
bool broken[E+1];              /* by era */
bool here[(E+1)*M];
byte seen[(E+1)*(S+2)];        /* by (era, sequence): 1 + epoch*16 + mask with which it was completed */
#define BIT(p) (1<<(p))
#define ALL0 (BIT(N)-1)
#define H(g,s,d,p) h[(((g)*2+((s)%2))*M+(d))*M+(p)]
#ifdef PAGES
#define P(g,s,d,p) pay[(((g)*2+((s)%2))*M+(d))*M+(p)]
#define FILL(g,s,d,p,v) P(g,s,d,p) = v
#define LOOK(g,s,d,p,v) assert(P(g,s,d,p) == v)
#else
#define FILL(g,s,d,p,v) skip
#define LOOK(g,s,d,p,v) skip
#endif
#ifdef EPOCHABORT
#define BROKEN broken[e]
#else
#define BROKEN broken[era]
#endif

inline may_die() {
  if :: atomic { crashes < CRASHES -> crashes++; dead[me] = 1; goto finished }
     :: true fi
}
inline op(sq) {
  p = 0; ok = 1;
  do :: p >= M -> break
     :: p < M -> if :: (mask & BIT(p)) && p != me -> FILL(era,sq,p,me,(sq)*4+e+1); H(era,sq,p,me) = (sq)*4+e+1 :: else fi; p++ od;
  p = 0;
  do :: p >= M || !ok -> break
     :: p < M && ok ->
        if :: !(mask & BIT(p)) || p == me -> skip
           :: else ->
              if :: H(era,sq,me,p) == (sq)*4+e+1 -> LOOK(era,sq,me,p,(sq)*4+e+1)
                 :: (dead[p] || BROKEN) -> ok = 0; BROKEN = 1
                 :: atomic { tmo < TMO -> tmo++ } -> ok = 0; BROKEN = 1      /* a deadline, nobody is dead */
              fi
        fi; p++ od;
  if :: ok -> d_step { assert(seen[era*(S+2)+(sq)] == 0 || seen[era*(S+2)+(sq)] == 1+e*16+mask); seen[era*(S+2)+(sq)] = 1+e*16+mask }
     :: else fi
}
/* the thread of a rank that listens: acknowledges or withdraws, and decides when it can; whoever lives may decide */
proctype Member(byte me) {
  byte p, n;
end:
  do
  :: (dead[me] || gone[me] || withdrawn || rst[1] == COMM) -> break
  :: atomic { !dead[me] && rst[1] == PROP && !acked[me] &&
#ifdef STALEACK
     true
#else
     (me == N || step[me] < B)
#endif
     -> acked[me] = 1 }
  :: atomic { !dead[me] && rst[1] == PROP && !acked[me] && me < N && step[me] >= B -> rst[1] = OPEN; withdrawn = 1 }
  :: atomic { !dead[me] && rst[1] == PROP ->
       p = 0; n = 0;
       do :: p >= M -> break :: p < M -> if :: dead[p] -> n = 100 :: else -> if :: acked[p] -> n++ :: else fi fi; p++ od;
       if :: n >= 100 -> rst[1] = OPEN; withdrawn = 1
#ifdef NOACK
          :: n < 100 -> rst[1] = COMM; rmask[1] = BIT(M)-1
#else
          :: n == M -> rst[1] = COMM; rmask[1] = BIT(M)-1
#endif
          :: else fi }
  od
}
inline recover() {
  ok = 0;
  do
  :: ok || e >= E -> break
  :: !ok && e < E ->
     may_die();
     if :: rst[e+1] == COMM -> skip
        :: rst[e+1] != COMM ->
#ifdef EVICT
           if :: ev = me :: me < N -> ev = (me+1)%N fi;    /* whom this rank takes for late; itself: nobody */
#else
           ev = me;
#endif
           p = 0; m = 0;
           do :: p >= M -> break
              :: p < M -> if :: (mask & BIT(p)) && !dead[p] && (ev == me || p != ev) -> m = m | BIT(p) :: else fi; p++ od;
           m = m | BIT(me);
#ifdef NOCAS
           if :: rst[e+1] != COMM -> rmask[e+1] = m; rec[e+1] = 1; withdrawn = (e == 0 -> 1 : withdrawn); rst[e+1] = COMM :: else fi
#else
           atomic { if
#ifdef NOTFINAL
             :: true
#else
             :: rst[e+1] != COMM
#endif
                -> rmask[e+1] = m; rec[e+1] = 1; withdrawn = (e == 0 -> 1 : withdrawn); rst[e+1] = COMM
#ifndef NOTFINAL
             :: else
#endif
             fi }
#endif
     fi;
     e++;
#ifdef OWNLIST
     if :: rec[e] -> mask = m :: else -> mask = rmask[e] fi;
#else
     mask = rmask[e];
#endif
     if :: !(mask & BIT(me)) -> gone[me] = 1; goto finished :: else fi;      /* Evicted */
     if :: !rec[e] -> skip          /* a planned change that was committed: adopted, pages stay */
        :: else ->
           here[e*M+me] = 1; p = 0; ok = 1;
           do :: p >= M || !ok -> break
              :: p < M && ok ->
                 if :: !(mask & BIT(p)) -> skip
                    :: else -> if :: here[e*M+p] -> skip :: dead[p] -> ok = 0 :: (rst[e+1] == COMM) -> ok = 0 fi
                 fi; p++ od;
#ifdef KEEPPAGES
           skip
#else
           if :: ok -> era = e :: else fi
#endif
     fi
  od
}
proctype Rank(byte me) {
  byte s, p, m, mask, e, era, ev; bit ok;
  s = 1; e = 0; era = 0; mask = ALL0; m = 0;
  if :: me == N ->      /* the joiner waits for the decision */
        may_die();
end0:   if :: rst[1] == COMM && !rec[1] -> s = B; e = 1; mask = BIT(M)-1 :: withdrawn || rec[1] -> gone[me] = 1; goto finished fi
     :: else fi;
  do
  :: s > S -> break
  :: s <= S ->
     may_die();
     if :: me == N -> skip
        :: else ->
           atomic { step[me] = s };            /* the boundary before operation s */
#ifndef NOWAIT
           if :: atomic { rst[1] == PROP && s >= B && !acked[me] -> rst[1] = OPEN; withdrawn = 1 }
              :: rst[1] == PROP && s >= B && acked[me] -> (rst[1] != PROP || broken[0])
              :: atomic { rst[1] == PROP && s >= B && acked[me] -> rst[1] = OPEN; withdrawn = 1 }    /* has waited long enough */
              :: rst[1] != PROP || s < B
           fi;
#endif
           if :: e == 0 && rst[1] == COMM && !rec[1] && s >= B -> e = 1; mask = rmask[1] :: else fi
     fi;
     may_die();
     op(s);
     if :: !ok -> break :: else -> s++ fi
  od;
  if :: s > S ->
end1: (BROKEN)
     :: else fi;
again:
  recover();
  if :: ok -> skip :: else -> goto finished fi;
  may_die();
  op(S+1);
  if :: !ok -> goto again :: else fi;
end2: (BROKEN || (e < E && rst[e+1] == COMM));
  goto again;
finished: skip
}
init {
  byte i = 0;
  atomic { rmask[0] = ALL0; do :: i >= M -> break :: i < M -> run Rank(i); run Member(i); i++ od }
  if :: B = 2 :: B = 1 fi;
  if :: atomic { rst[1] == OPEN && !withdrawn -> rst[1] = PROP } :: withdrawn = 1 :: (rst[1] == COMM) fi
}
