// A Google Cloud Storage server for tests: fake-gcs-server in memory, behind the one verb of Google's XML
// API that it lacks and that obstore writes with.
//
// obstore creates a file by `PUT /bucket/object` with the header `x-goog-if-generation-match: 0`.
// fake-gcs-server takes uploads by the JSON API only, where the same condition is the query parameter
// `ifGenerationMatch`. This front translates the one to the other and nothing else; the condition is then
// decided by fake-gcs-server, under its lock. A PUT without the header has no condition.
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

func main() {
	address := flag.String("address", "127.0.0.1:0", "host:port to listen at")
	bucket := flag.String("bucket", "bucket", "bucket to create")
	flag.Parse()

	listener, err := net.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		NoListener: true,
		PublicHost: listener.Addr().String(),
	})
	if err != nil {
		log.Fatal(err)
	}
	server.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: *bucket})
	fmt.Printf("listening at %s\n", listener.Addr())
	log.Fatal(http.Serve(listener, front(server.HTTPHandler(), listener.Addr().String())))
}

// front answers `PUT /bucket/object` by a JSON API upload of the same body under the same condition. All
// requests are for host, by whatever way they came: fake-gcs-server knows its own name only.
func front(next http.Handler, host string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Host = host
		bucket, object, found := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		if r.Method != http.MethodPut || !found || bucket == "upload" || bucket == "_internal" {
			next.ServeHTTP(w, r)
			return
		}
		query := url.Values{"uploadType": {"media"}, "name": {object}}
		if generation := r.Header.Get("x-goog-if-generation-match"); generation != "" {
			query.Set("ifGenerationMatch", generation)
		}
		upload := r.Clone(r.Context())
		upload.Method = http.MethodPost
		upload.URL = &url.URL{Path: "/upload/storage/v1/b/" + bucket + "/o", RawQuery: query.Encode()}
		upload.RequestURI = upload.URL.RequestURI()
		w.Header().Set("ETag", `"unknown"`) // obstore wants one; the JSON API has it in the body
		next.ServeHTTP(w, upload)
	})
}
