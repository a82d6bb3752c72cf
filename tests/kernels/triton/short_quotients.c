#include <stdio.h>
#include <stdint.h>
#include <string.h>
#include <stdlib.h>
#include <math.h>
static float f(uint32_t b){float x;memcpy(&x,&b,4);return x;}
int main(int argc,char**argv){
  int bits=atoi(argv[1]); // mantissa bits of a
  long bad=0, bad1=0;
  #pragma omp parallel for reduction(+:bad,bad1) schedule(static)
  for(uint32_t m=0;m<(1u<<23);m++){
    float b=f(0x3f800000u|m); float y=1.0f/b; float r=fmaf(-b,y,1.0f); float lo=r*y;
    long c=0,c1=0;
    for(uint32_t k=0;k<(1u<<bits);k++){
      float a=f(0x3f800000u|(k<<(23-bits)));
      float q=fmaf(a,y,a*lo); float e=a/b; if(q!=e){ uint32_t qb,eb; memcpy(&qb,&q,4);memcpy(&eb,&e,4); c++; if(((qb&0x7ff)==0)||((eb&0x7ff)==0)) {c1++; printf("a %a b %a q %a e %a\n",a,b,q,e);} }
    }
    bad+=c; bad1+=c1;
  }
  printf("bits %d bad %ld of %ld; a*y alone bad %ld\n",bits,bad,1L<<(23+bits),bad1);
}
